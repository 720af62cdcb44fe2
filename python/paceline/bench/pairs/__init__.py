# SPDX-License-Identifier: Apache-2.0
"""`paceline bench pairs`: one table for several pairs of a target and a drafter."""
