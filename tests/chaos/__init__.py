"""Faults in a running cluster, under load: each is provoked, watched and written down.

    questions ──> load ──────────────> outcomes ─┐
                   │ HTTP                        ├──> trial record (JSON) ──> report (tables)
    fault ──> system (Ray, Serve) ───> recovery ─┘

``python -m tests.chaos`` records; the tests of this directory run each fault once the same way.
"""
