"""What studies share: titles and colours, averages over runs, provenance, figures and table files."""
