"""Where objects really lie: local files, memory, S3. Each does the same few things, chosen by the root's scheme."""
