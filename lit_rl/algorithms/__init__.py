"""One file per algorithm over `base.RLModule`, which holds the step.

To add one: a file here with a subclass that overrides what differs (`prepare`, `assign_credit`, `loss`,
`sync`), and a yaml in `conf/algo/` whose `_target_` names it. Nothing else knows the list.
"""
