"""The command line, deployments on this machine, certificates, and the autoscaling policy."""
