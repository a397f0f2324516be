//! The parts of `Node.status` that come from the runtime: images, runtime handlers, features.

use std::time::Duration;

use k8s_openapi::api::core::v1::{
    ContainerImage, NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeStatus,
};
use pod_sync_clients::Runtime;
use pod_sync_node_decisions::image_gc::Image;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use pod_sync_layout::{NodeSettings, RuntimeState};
use quintlet_config::table::{BIND_MOUNT_OPTIONS, MEMORY_VOLUME_RESIZE};

/// Interval between lists of images (pkg/kubelet/images/image_gc_manager.go).
const PERIOD: Duration = Duration::from_secs(30);
/// Interval between attempts while lists fail.
const RETRY: Duration = Duration::from_secs(1);
/// Names reported per image (pkg/kubelet/nodestatus: MaxNamesPerImageInNodeStatus).
const MAX_NAMES: usize = 5;
/// Declared features of the node, sorted as the API server requires
/// (component-helpers/nodedeclaredfeatures/features).
const DECLARED: [&str; 6] = [
    EXTEND_WEB_SOCKETS,
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    MEMORY_VOLUME_RESIZE,
    "RestartAllContainersOnContainerExits",
    BIND_MOUNT_OPTIONS,
];

const EXTEND_WEB_SOCKETS: &str = "ExtendWebSocketsToKubelet";

/// Lists the runtime's images periodically until `stop`. While lists fail, the last images stay published.
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
                tracing::debug!(%error, "image list failed, retrying");
                RETRY
            }
        };
        // Dropping the sleep ends the loop.
        tokio::select! {
            () = stop.cancelled() => return,
            () = quintlet_kit::timers::pause(wait) => {}
        }
    }
}

/// Returns the `most` largest images, or all.
fn largest(mut images: Vec<Image>, most: Option<usize>) -> Vec<ContainerImage> {
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

/// Sets the fields that come from the runtime. A field that the runtime has not reported keeps its value in
/// the API server.
pub(crate) fn set_runtime_status(
    status: &mut NodeStatus,
    runtime: &RuntimeState,
    images: Option<Vec<ContainerImage>>,
    settings: &NodeSettings,
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
    let declared = declared_features(settings, runtime).into_iter();
    status.declared_features = Some(declared.map(str::to_owned).collect());
}

/// Returns a runtime version as the kubelet reports it: `1.6.20~ds1` is 1.6.20, `v2.1.0-rc.1` is 2.1.0-rc.1
/// (apimachinery/pkg/util/version: ParseGeneric).
#[must_use]
pub(crate) fn plain_version(version: &str) -> &str {
    let text = version.trim().trim_start_matches('v');
    let numbers = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let is_semantic = text[numbers..].starts_with(['-', '+'])
        && text[numbers..].chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.'));
    let plain = if is_semantic { text } else { text[..numbers].trim_end_matches('.') };
    // A text that is not a version is reported unchanged.
    if plain.starts_with(|c: char| c.is_ascii_digit()) { plain } else { version }
}

/// Returns the declared features of the node, sorted.
#[must_use]
pub fn declared_features(settings: &NodeSettings, runtime: &RuntimeState) -> Vec<&'static str> {
    let is_declared = |name: &&str| match *name {
        EXTEND_WEB_SOCKETS => settings.node_api_port != 0,
        MEMORY_VOLUME_RESIZE => settings.field_gates.memory_volume_resize,
        BIND_MOUNT_OPTIONS => settings.field_gates.bind_mount_options && runtime.mount_options,
        _ => true,
    };
    DECLARED.into_iter().filter(is_declared).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_sync_layout::HandlerFeatures;

    fn image(id: &str, size: u64, names: &[&str]) -> Image {
        let names = names.iter().map(|n| (*n).to_owned()).collect();
        Image { id: id.to_owned(), names, size, pinned: false }
    }

    #[test]
    fn the_largest_images_are_reported_with_five_names_each() {
        let images = || {
            vec![
                image("a", 5, &["small:1"]),
                image("b", 7, &["1", "2", "3", "4", "5", "6"]),
                image("c", 7, &["same:1"]),
                image("d", 9, &[]),
            ]
        };
        let reported = |most| -> Vec<(i64, Vec<String>)> {
            let size_and_names =
                |i: ContainerImage| (i.size_bytes.unwrap_or_default(), i.names.unwrap_or_default());
            largest(images(), most).into_iter().map(size_and_names).collect()
        };
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let all = [
            (9, names(&[])),
            (7, names(&["same:1"])),
            (7, names(&["1", "2", "3", "4", "5"])),
            (5, names(&["small:1"])),
        ];
        assert_eq!(reported(None), all);
        assert_eq!(reported(Some(2)), all[..2]);
        assert_eq!(reported(Some(0)), []);
    }

    #[test]
    fn a_feature_is_declared_if_its_feature_gate_is_on() {
        // component-helpers/nodedeclaredfeatures/features/registry.go: each is declared if its gate is on.
        const REGISTRY: [&str; 5] = [
            "RestartAllContainersOnContainerExits",
            "InPlacePodLevelResourcesVerticalScaling",
            "ExtendWebSocketsToKubelet",
            "InPlacePodVerticalScalingInitContainers",
            "UserNamespacesHostNetworkSupport",
        ];
        let fixed = |feature: &&&str| ![BIND_MOUNT_OPTIONS, MEMORY_VOLUME_RESIZE].contains(*feature);
        for feature in REGISTRY.iter().chain(&DECLARED).filter(fixed) {
            let gate = quintlet_config::table::GATES.iter().find(|g| g.name == *feature);
            assert_eq!(gate.map(|g| g.fixed), Some(DECLARED.contains(feature)), "{feature}");
        }
    }

    #[test]
    fn bind_mount_options_are_declared_with_their_feature_gate_and_a_runtime_that_applies_them() {
        for (gate, mount_options) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut settings = NodeSettings::default();
            settings.field_gates.bind_mount_options = gate;
            let runtime = RuntimeState { mount_options, ..RuntimeState::default() };
            let declared = declared_features(&settings, &runtime);
            assert_eq!(declared.contains(&"VolumeBindMountOptions"), gate && mount_options);
            assert!(declared.is_sorted());
        }
    }

    #[test]
    fn the_resize_of_memory_backed_volumes_is_declared_with_its_feature_gate() {
        for gate in [false, true] {
            let mut settings = NodeSettings::default();
            settings.field_gates.memory_volume_resize = gate;
            let declared = declared_features(&settings, &RuntimeState::default());
            assert_eq!(declared.contains(&"InPlacePodVerticalScalingMemoryBackedVolumes"), gate);
            assert!(declared.is_sorted());
        }
    }

    #[test]
    fn the_suffix_of_a_distribution_is_dropped_from_a_version() {
        let cases = [
            ("1.6.20~ds1", "1.6.20"),
            ("v2.1.0-rc.1", "2.1.0-rc.1"),
            ("1.7.24+unknown", "1.7.24+unknown"),
            ("2.1", "2.1"),
            ("1.6.20 (Debian)", "1.6.20"),
            ("unknown", "unknown"),
            ("", ""),
        ];
        for (reported, want) in cases {
            assert_eq!(plain_version(reported), want, "{reported}");
        }
    }

    #[test]
    fn runtime_handlers_are_reported_after_the_first_answer_of_the_runtime() {
        let mut status = NodeStatus::default();
        let served = NodeSettings { node_api_port: 10250, ..NodeSettings::default() };
        set_runtime_status(&mut status, &RuntimeState::default(), None, &served);
        assert_eq!((&status.runtime_handlers, &status.features, &status.images), (&None, &None, &None));
        let behind_gates = [BIND_MOUNT_OPTIONS, MEMORY_VOLUME_RESIZE];
        let declared: Vec<&str> = DECLARED.into_iter().filter(|name| !behind_gates.contains(name)).collect();
        assert_eq!(status.declared_features.clone().unwrap_or_default(), declared);
        assert!(DECLARED.is_sorted());

        let can = HandlerFeatures { user_namespaces: true, ..HandlerFeatures::default() };
        let runtime = RuntimeState {
            name: "containerd".to_owned(),
            handlers: [("runc".to_owned(), can)].into(),
            supplemental_groups_policy: Some(false),
            ..RuntimeState::default()
        };
        set_runtime_status(&mut status, &runtime, Some(Vec::new()), &NodeSettings::default());
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
            "node-api is not served: {declared:?}"
        );
    }
}
