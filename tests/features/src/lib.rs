//! Holds nothing: its manifest turns on, for the tests of each crate alone, the features that the whole workspace has.
