"""Turns the project's claims about speed and accuracy into tables that anyone can write again."""
