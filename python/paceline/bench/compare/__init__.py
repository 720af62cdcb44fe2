# SPDX-License-Identifier: Apache-2.0
"""`paceline bench compare`: the ratios of reports that were measured by turns."""
