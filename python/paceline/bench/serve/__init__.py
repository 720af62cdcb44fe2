# SPDX-License-Identifier: Apache-2.0
"""`paceline bench serve`: load on any server with OpenAI's API."""
