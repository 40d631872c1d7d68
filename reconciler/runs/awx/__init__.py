"""Runs as jobs of AWX: the same run contract and run folder, launched through AWX's REST API.

A process here launches the job, follows it, and writes its progress and outcome. That process may
end at any time: the folder holds everything that the next process needs to go on.
"""
