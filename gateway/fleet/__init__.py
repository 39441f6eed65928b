"""The replicas as this gateway drives them: reports in, placements out, orders carried out.

`pump` is the asyncio driver of the pure `core.dispatcher`; `watch` feeds it, `placing` obeys it.
"""
