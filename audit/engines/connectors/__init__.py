"""The live KV connector: its scheduler side, its worker side, its metadata."""
