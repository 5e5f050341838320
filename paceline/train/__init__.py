"""Training: the demo pair's corpus, tokenizer, target and drafter. Needs `transformers`."""
