"""What pages share: figures, tables, names of metrics, writing of files."""
