"""Plans and traces as text, tables, charts, pages and files of other tools."""
