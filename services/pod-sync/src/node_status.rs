//! What the Node's status says of the runtime: its images, what its handlers can do, and what pods may ask of this node.

use std::time::Duration;

use k8s_openapi::api::core::v1::{
    ContainerImage, NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeStatus,
};
use pod_sync_clients::Runtime;
use pod_sync_decisions::image_gc::Image;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::context::RuntimeState;

/// How often images are listed (pkg/kubelet/images/image_gc_manager.go).
const PERIOD: Duration = Duration::from_secs(30);
/// While they cannot be listed.
const RETRY: Duration = Duration::from_secs(1);
/// Names of an image that are told (pkg/kubelet/nodestatus/setters.go).
const MAX_NAMES: usize = 5;
/// What pods may ask of a node that tells of it (component-helpers/nodedeclaredfeatures/features), in the order of the alphabet:
/// an API server takes no other.
const DECLARED: [&str; 4] = [
    "ExtendWebSocketsToKubelet",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];

/// Lists the runtime's images now and then, until told to stop. Those listed last count while it does not answer.
pub async fn poll_images(
    runtime: Runtime,
    most: Option<usize>,
    out: watch::Sender<Option<Vec<ContainerImage>>>,
    stop: CancellationToken,
) {
    loop {
        let wait = match runtime.images().await {
            Ok(images) => {
                let images = Some(largest(images, most));
                out.send_if_modified(|old| {
                    let changed = *old != images;
                    *old = images;
                    changed
                });
                PERIOD
            }
            Err(error) => {
                tracing::debug!(%error, "images not listed");
                RETRY
            }
        };
        // Cutting the sleep only ends the loop.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// The largest images, as many as `most`; all without it.
#[must_use]
pub fn largest(mut images: Vec<Image>, most: Option<usize>) -> Vec<ContainerImage> {
    images.sort_by(|a, b| (b.size, &b.id).cmp(&(a.size, &a.id)));
    images.truncate(most.unwrap_or(usize::MAX));
    images
        .into_iter()
        .map(|mut image| {
            image.names.truncate(MAX_NAMES);
            ContainerImage {
                names: Some(image.names),
                size_bytes: Some(i64::try_from(image.size).unwrap_or(i64::MAX)),
            }
        })
        .collect()
}

/// Adds what the runtime told. What it has not told stays as it is in the API server.
pub fn of_runtime(
    status: &mut NodeStatus,
    runtime: &RuntimeState,
    images: Option<Vec<ContainerImage>>,
    has_node_api: bool,
) {
    let handlers = runtime.handlers.iter().map(|(name, can)| NodeRuntimeHandler {
        name: Some(name.clone()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(can.recursive_read_only_mounts),
            user_namespaces: Some(can.user_namespaces),
        }),
    });
    status.runtime_handlers = runtime.is_known().then(|| handlers.collect());
    status.features = runtime
        .supplemental_groups_policy
        .map(|policy| NodeFeatures { supplemental_groups_policy: Some(policy) });
    status.images = images;
    let declared = declared(has_node_api).into_iter();
    status.declared_features = Some(declared.map(str::to_owned).collect());
}

/// A runtime's version as the kubelet tells it (component-base/version ParseGeneric): `1.6.20~ds1` of a distribution is 1.6.20,
/// `v2.1.0-rc.1` is 2.1.0-rc.1.
#[must_use]
pub fn plain_version(version: &str) -> &str {
    let text = version.trim().trim_start_matches('v');
    let numbers = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let is_semantic = text[numbers..].starts_with(['-', '+'])
        && text[numbers..].chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.'));
    let plain = if is_semantic { text } else { text[..numbers].trim_end_matches('.') };
    // One that is no version is told as it is.
    if plain.starts_with(|c: char| c.is_ascii_digit()) { plain } else { version }
}

/// Features that the node tells of, in the order of the alphabet.
#[must_use]
pub fn declared(has_node_api: bool) -> Vec<&'static str> {
    DECLARED.into_iter().filter(|name| has_node_api || *name != "ExtendWebSocketsToKubelet").collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_sync_cri_config::HandlerFeatures;

    fn image(id: &str, size: u64, names: &[&str]) -> Image {
        let names = names.iter().map(|n| (*n).to_owned()).collect();
        Image { id: id.to_owned(), names, size, pinned: false }
    }

    #[test]
    fn the_largest_images_are_told_with_five_names() {
        let images = || {
            vec![
                image("a", 5, &["small:1"]),
                image("b", 7, &["1", "2", "3", "4", "5", "6"]),
                image("c", 7, &["same:1"]),
                image("d", 9, &[]),
            ]
        };
        let told = |most| -> Vec<(i64, Vec<String>)> {
            let of = |i: ContainerImage| (i.size_bytes.unwrap_or_default(), i.names.unwrap_or_default());
            largest(images(), most).into_iter().map(of).collect()
        };
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let all = [
            (9, names(&[])),
            (7, names(&["same:1"])),
            (7, names(&["1", "2", "3", "4", "5"])),
            (5, names(&["small:1"])),
        ];
        assert_eq!(told(None), all);
        assert_eq!(told(Some(2)), all[..2]);
        assert_eq!(told(Some(0)), []);
    }

    #[test]
    fn what_is_declared_is_what_the_table_of_gates_says() {
        // component-helpers/nodedeclaredfeatures/features/registry.go: each is declared if its gate is on.
        const REGISTRY: [&str; 5] = [
            "RestartAllContainersOnContainerExits",
            "InPlacePodLevelResourcesVerticalScaling",
            "ExtendWebSocketsToKubelet",
            "InPlacePodVerticalScalingInitContainers",
            "UserNamespacesHostNetworkSupport",
        ];
        for feature in REGISTRY.iter().chain(&DECLARED) {
            let gate = quintlet_config::table::GATES.iter().find(|g| g.name == *feature);
            assert_eq!(gate.map(|g| g.fixed), Some(DECLARED.contains(feature)), "{feature}");
        }
    }

    #[test]
    fn a_version_is_told_without_what_a_distribution_adds() {
        let cases = [
            ("1.6.20~ds1", "1.6.20"),
            ("v2.1.0-rc.1", "2.1.0-rc.1"),
            ("1.7.24+unknown", "1.7.24+unknown"),
            ("2.1", "2.1"),
            ("1.6.20 (Debian)", "1.6.20"),
            ("unknown", "unknown"),
            ("", ""),
        ];
        for (told, want) in cases {
            assert_eq!(plain_version(told), want, "{told}");
        }
    }

    #[test]
    fn what_the_runtime_can_do_is_told_once_it_answered() {
        let mut status = NodeStatus::default();
        of_runtime(&mut status, &RuntimeState::default(), None, true);
        assert_eq!((&status.runtime_handlers, &status.features, &status.images), (&None, &None, &None));
        assert_eq!(status.declared_features.clone().unwrap_or_default(), DECLARED);
        assert!(DECLARED.is_sorted());

        let can = HandlerFeatures { user_namespaces: true, ..HandlerFeatures::default() };
        let runtime = RuntimeState {
            name: "containerd".to_owned(),
            handlers: [("runc".to_owned(), can)].into(),
            supplemental_groups_policy: Some(false),
            ..RuntimeState::default()
        };
        of_runtime(&mut status, &runtime, Some(Vec::new()), false);
        let features = NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(false),
            user_namespaces: Some(true),
        };
        let handler = NodeRuntimeHandler { name: Some("runc".to_owned()), features: Some(features) };
        assert_eq!(status.runtime_handlers, Some(vec![handler]));
        assert_eq!(status.features, Some(NodeFeatures { supplemental_groups_policy: Some(false) }));
        assert_eq!(status.images, Some(Vec::new()));
        let declared = status.declared_features.unwrap_or_default();
        assert!(
            !declared.contains(&"ExtendWebSocketsToKubelet".to_owned()),
            "nobody serves it: {declared:?}"
        );
    }
}
