"""Runs as jobs of AWX: the same run contract and the same run folder, started through its REST API.

What AWX does is its own; a process here asks for the job, follows it, and writes down what it says.
That process may end at any time: the folder holds all that the next one needs to go on.
"""
