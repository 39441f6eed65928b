"""One completion on its way: asked, named, admitted, placed, sent, answered, billed.

`handlers` is the way in words, one coroutine a request; `short_way` takes those that nothing holds
up, all of one turn of the event loop together. `errand` is what both carry along.
"""
