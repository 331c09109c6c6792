"""The report: one HTML page about runs, without scripts, that needs nothing from the network.

`gather` reads runs with the readers of the doctor, `compare` puts those together that differ in
the seed alone, `charts` draws, and `page` fills the template.
"""
