"""Where instances come from beside the settings: files, DNS, Kubernetes. See the README."""
