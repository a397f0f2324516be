//! The gRPC contracts between a node agent and its plugins: registration, the node side of CSI 1.x, device
//! plugins, and drivers of dynamic resource allocation.
//!
//! The files below `proto` have the names and field numbers of the public contracts, without parts that a
//! node agent does not use. Servers and clients are compiled: the CSI driver, the device plugin and the DRA
//! driver of the tests use the servers.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

/// Registration of plugins below `<root>/plugins_registry` (`k8s.io/kubelet/pkg/apis/pluginregistration/v1`).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// Device plugins and their registration (`k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1`).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod device_plugin {
    tonic::include_proto!("v1beta1");
}

/// Drivers of dynamic resource allocation (`k8s.io/kubelet/pkg/apis/dra`).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod dra {
    /// The current version.
    pub mod v1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }

    /// The version of drivers for Kubernetes 1.32 and 1.33.
    pub mod v1beta1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }
}

/// The health of devices of dynamic resource allocation (`k8s.io/kubelet/pkg/apis/dra-health`).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod dra_health {
    /// The current version.
    pub mod v1 {
        tonic::include_proto!("v1");
    }

    /// The version of drivers for Kubernetes 1.34 to 1.36.
    pub mod v1alpha1 {
        tonic::include_proto!("v1alpha1");
    }
}

/// The Container Storage Interface, services Identity and Node.
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod csi {
    tonic::include_proto!("csi.v1");

    /// Implements `Debug` without the fields that may hold credentials.
    macro_rules! debug_without_secrets {
        ($($message:ident),*) => {$(
            impl std::fmt::Debug for $message {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.debug_struct(stringify!($message)).field("volume_id", &self.volume_id).finish_non_exhaustive()
                }
            }
        )*};
    }
    debug_without_secrets!(NodeStageVolumeRequest, NodePublishVolumeRequest, NodeExpandVolumeRequest);
}

#[cfg(test)]
mod tests {
    use super::csi::NodeStageVolumeRequest;

    #[test]
    fn a_request_is_printed_without_its_secrets() {
        let secrets = [("password".to_owned(), "hunter2".to_owned())].into();
        let request = NodeStageVolumeRequest { volume_id: "v".to_owned(), secrets, ..Default::default() };
        assert_eq!(format!("{request:?}"), "NodeStageVolumeRequest { volume_id: \"v\", .. }");
    }
}
