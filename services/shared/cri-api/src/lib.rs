//! The Container Runtime Interface (CRI) of Kubernetes 1.37: the contract between a node agent and a
//! container runtime.
//!
//! The files below `proto` have the names and field numbers of the public contract. A runtime of an older
//! version ignores fields that it does not know, and answers UNIMPLEMENTED to methods that it does not have.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

/// Version v1, the only one since Kubernetes 1.26.
#[allow(missing_docs, clippy::all, unreachable_pub, deprecated, reason = "generated from the contract")]
pub mod v1 {
    tonic::include_proto!("runtime.v1");

    impl std::fmt::Debug for AuthConfig {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("AuthConfig").field("server_address", &self.server_address).finish_non_exhaustive()
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::v1::{AuthConfig, KeyValue, PullImageRequest, RuntimeFeatures};

    #[test]
    fn a_pull_is_printed_without_its_credentials() {
        let auth = AuthConfig {
            password: "hunter2".to_owned(),
            auth: "hunter2".to_owned(),
            ..AuthConfig::default()
        };
        let text = format!("{:?}", PullImageRequest { auth: Some(auth), ..PullImageRequest::default() });
        assert!(!text.contains("hunter2"), "{text}");
    }

    #[test]
    fn a_variable_has_the_wire_form_of_older_versions_whatever_its_bytes_are() {
        // Field 2 was a string until Kubernetes 1.35: tag 0x12, the length, the bytes.
        let variable = KeyValue { key: "A".to_owned(), value: b"\xff\x00".to_vec() };
        assert_eq!(variable.encode_to_vec(), b"\x0a\x01A\x12\x02\xff\x00");
    }

    #[test]
    fn features_that_an_older_runtime_does_not_send_are_off() {
        let old = RuntimeFeatures::decode(&b"\x08\x01"[..]).unwrap();
        let want = RuntimeFeatures { supplemental_groups_policy: true, ..RuntimeFeatures::default() };
        assert_eq!(old, want);
    }
}
