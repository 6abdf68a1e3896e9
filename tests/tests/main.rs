//! The only integration test binary: tests the program end to end, from the views of a user and a trainer.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod append;
mod carry;
mod cli;
#[cfg(feature = "distributed")]
mod cluster;
#[cfg(feature = "distributed")]
mod cluster_credentials;
#[cfg(feature = "distributed")]
mod cluster_demo;
#[cfg(feature = "distributed")]
mod cluster_faults;
#[cfg(feature = "distributed")]
mod cluster_hub;
#[cfg(feature = "distributed")]
mod cluster_kills;
#[cfg(feature = "distributed")]
mod cluster_lost;
#[cfg(feature = "distributed")]
mod cluster_network;
#[cfg(feature = "distributed")]
mod cluster_requests;
#[cfg(feature = "distributed")]
mod cluster_service;
#[cfg(feature = "distributed")]
mod cluster_store;
#[cfg(feature = "distributed")]
mod cluster_tls;
#[cfg(feature = "distributed")]
mod cluster_trust;
mod compatibility;
mod corpora;
mod corrupt;
mod deduplicate;
mod demo;
mod derive;
mod digits;
mod empty_results;
mod engine;
mod exports;
mod features;
mod generation;
mod hub_datasets;
mod images;
mod init;
mod input;
mod integrity;
mod job_files;
mod messages;
mod mixture;
mod papers;
mod pins;
mod plan;
mod python;
mod recovery_advice;
mod resume;
mod service_api;
mod service_bounds;
mod service_cli;
mod service_disk;
mod service_failures;
mod service_kills;
mod service_order;
mod service_recipe;
mod service_refusals;
mod service_server;
mod service_streams;
mod smollm2;
mod statistics;
mod store_faults;
mod stores;
mod text_and_teacher;
