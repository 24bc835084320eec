"""Tables and pictures of the records: all rendering."""
