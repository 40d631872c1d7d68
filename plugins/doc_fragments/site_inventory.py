"""Options and notes that the inventory plugins share."""

from __future__ import annotations


class ModuleDocFragment:
    """Options of `_site_inventory.SiteInventory`."""

    DOCUMENTATION = r"""
options:
  timeout:
    description: Seconds in which the service must have answered completely.
    type: int
    default: 30
notes:
  - The whole inventory is refused when a record has another form than expected, when two records
    have one name, or when a host has the name of a group. The text begins with a code.
  - Ansible goes on without a source that it could not read. Set
    C(ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED=true) to stop instead, as AWX does.
  - Texts of the service are marked unsafe, so that none of them is a template. A connection
    variable that an earlier source has set for a host of the same name stays.
  - Redirects are not followed and proxies are not used.
"""
