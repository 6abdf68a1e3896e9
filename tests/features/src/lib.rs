//! Empty crate. Its manifest enables the features of the whole workspace when the tests of a single crate are built.
