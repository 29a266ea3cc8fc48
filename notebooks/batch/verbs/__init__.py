"""What `workbench` does besides executing notebooks, one verb a file. Each file declares its own options; `cli` reads
them. Nothing heavy is imported before a verb is called, so that help, completion and mistakes answer at once."""
