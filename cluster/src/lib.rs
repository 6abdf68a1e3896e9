//! A job on a cluster.
