"""Pages: what a store reports, as HTML and SVG.

    summary    every number of a page, as structs
    gather     how they are found in a store
    markup     text that is markup, and the one place that escapes all other text
    figures    sizes of labels, scales of colours, axes, SVG files
    heatmap, lineage, curve, treemap, matrix   pictures
    document   the skeleton of a page: style, script, content security policy; tables
    verdict, maps, sections   what stands on a page
    report, usage             whole pages: of a snapshot, of two, of `du`
    site                      what pages of a server share: links, the bar above, lists in parts
    browse, snapshot          the other pages of a server: of the whole store, of one snapshot
    card                      a model card as markup

Pure functions but for `gather`, which reads a store.  The same summary gives the same bytes: pages
have no date of making and no random ids.  Nothing is printed, and nothing is loaded from elsewhere.
"""
