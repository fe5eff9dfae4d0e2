"""How stages start, find and reach each other. Everything that sends or receives is here."""
