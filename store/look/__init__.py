"""What is seen of a store without a change to it: what is there, whether it is whole, what differs, what it weighs."""
