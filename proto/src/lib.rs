//! The contracts between the five services, compiled from `proto/quintlet/*/v1`.
//!
//! The wire types end here: each service turns them into the types of `quintlet-model` at its edge.
#![allow(missing_docs, clippy::all, unreachable_pub)]

/// Shared pieces: greeting, trace context.
pub mod common {
    pub mod v1 {
        tonic::include_proto!("quintlet.common.v1");
    }
}
/// Runtime hints and probe execs (cri-proxy).
pub mod runtime {
    pub mod v1 {
        tonic::include_proto!("quintlet.runtime.v1");
    }
}
/// Runtime state of pods (pleg-service).
pub mod pleg {
    pub mod v1 {
        tonic::include_proto!("quintlet.pleg.v1");
    }
}
/// Probe targets and results (probe-service).
pub mod probe {
    pub mod v1 {
        tonic::include_proto!("quintlet.probe.v1");
    }
}
/// API writes (status-reporter).
pub mod status {
    pub mod v1 {
        tonic::include_proto!("quintlet.status.v1");
    }
}
/// Pods and decisions (pod-sync).
pub mod podsync {
    pub mod v1 {
        tonic::include_proto!("quintlet.podsync.v1");
    }
}
/// Spans, metrics, build (every service).
pub mod debug {
    pub mod v1 {
        tonic::include_proto!("quintlet.debug.v1");
    }
}

/// Descriptors of all contracts, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("quintlet");

/// Version of the contracts this build speaks.
pub const SCHEMA: u32 = 1;

/// The greeting of this build.
pub fn hello() -> common::v1::Hello {
    common::v1::Hello { build: env!("CARGO_PKG_VERSION").to_owned(), features: Vec::new(), schema: SCHEMA }
}
