"""The command line, the local cluster, and what decides where things run."""
