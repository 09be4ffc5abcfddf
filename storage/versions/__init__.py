"""Versions: how they are committed, read and checked.

`manifests` reads the commit record of a version; `drafts` writes data objects and then the manifest, and continues
where a killed writer stopped. `datasets` and `checkpoints` write and read the two forms of data; `fetch` brings their
files to local disk and checks size and hash. `contents` checks rows and schemas, `model_files` refuses files that would
run code, `weights` loads a checkpoint's model, and has its adapters. `aliases` are names that point at versions;
`lineage` follows manifests to ancestors and descendants.
"""
