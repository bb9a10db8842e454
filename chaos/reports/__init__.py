"""A verdict as people and programs read it: in the terminal, as JSON, as JUnit XML, as one page of HTML."""
