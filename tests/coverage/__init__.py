"""Which tests show which row of the requirements.

A test, or a whole file through `pytestmark`, names its rows: `@pytest.mark.covers("HOST-4")`.
`python -m tests.coverage` collects the marks and writes docs/*-coverage.md; a test compares.
"""
