"""Single sign-on of people: the flows of browsers and programs, which end in a key that expires."""
