"""HOW it is read: load, table, Markdown, HTML, comparison. Imports neither torch nor a framework."""
