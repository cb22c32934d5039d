"""What real engines load to keep their pages in this store, one package an engine."""
