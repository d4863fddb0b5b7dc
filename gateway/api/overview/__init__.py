"""The state of the whole fleet at one moment, for people: in the terminal, in a browser, in scripts."""
