//! Reads the objects of a pod's volumes.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Pod, Volume as PodVolume};
use pod_sync_volume_reconcile::desired::DesiredVolume;
use quintlet_model::ids::PodUid;

use crate::claims::{self, DriverRules, Provided, Source, Uses};
use crate::in_tree;
use crate::selinux::{self, Finding, Labels};
use crate::tools::Tools;

/// A volume of a pod with everything that operations need.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub(crate) pod: Arc<Pod>,
    /// The volume for the desired state.
    pub(crate) desired: DesiredVolume,
    /// The volume of the plugin.
    pub(crate) provided: Provided,
    /// The settings of the driver; those of a driver without an object if the volume has none.
    pub(crate) rules: DriverRules,
    /// The SELinux labels of the volume.
    pub(crate) labels: Labels,
}

/// The volumes of a pod, by their names in the pod, and the errors of the others.
#[derive(Debug, Default)]
pub(crate) struct Resolution {
    pub(crate) volumes: BTreeMap<String, Resolved>,
    /// By the name in the pod.
    pub(crate) errors: Vec<(String, String)>,
}

/// Resolves all volumes of a pod that operations mount. Without an API server, volumes that have objects are
/// errors.
pub(crate) async fn resolve(tools: &Tools, pod: &Arc<Pod>, uid: &PodUid) -> Resolution {
    let uses = Uses::of(pod);
    let resolve_one = |volume| one(tools, (pod, uid), volume, &uses);
    let all =
        claims::provided(pod).into_iter().map(|volume| async move { (volume, resolve_one(volume).await) });
    let mut resolution = Resolution::default();
    for (volume, resolved) in join_all(all).await {
        match resolved {
            Ok(resolved) => drop(resolution.volumes.insert(volume.name.clone(), resolved)),
            Err(error) => resolution.errors.push((volume.name.clone(), error)),
        }
    }
    resolution
}

async fn one(
    tools: &Tools,
    (pod, uid): (&Arc<Pod>, &PodUid),
    volume: &PodVolume,
    uses: &Uses,
) -> Result<Resolved, String> {
    let attaches = tools.controller_attaches;
    if let Some(of_pod) = pod_sync_in_tree::volume::Volume::of_pod(volume) {
        let desired = in_tree::desired(uid, &of_pod, None, attaches);
        let provided = claims::in_tree(of_pod);
        let (rules, labels) = (DriverRules::of(None), Labels::default());
        return Ok(Resolved { pod: Arc::clone(pod), desired, provided, rules, labels });
    }
    let Some(objects) = tools.objects.as_deref() else {
        return Err(format!("volume {} needs an API server, and there is none", volume.name));
    };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let provided = match (claims::claim_of(pod, volume), &volume.csi) {
        (Some(used), _) => {
            let failed = |text: String| claims::of_claim(namespace, &used.name, &text);
            let claim = objects.claim(namespace, &used.name).await;
            let claim = claim.map_err(|e| failed(format!("failed to fetch PVC from API server: {e}")))?;
            let name = claims::check_claim(pod, &used, &claim)?;
            let object = objects.volume(&name).await;
            let object =
                object.map_err(|e| failed(format!("failed to fetch PV {name} from API server: {e}")))?;
            let had_driver = object.spec.as_ref().is_some_and(|spec| spec.csi.is_some());
            let object = pod_sync_in_tree::translation::to_csi(object)?;
            let provided = claims::of_persistent_volume(&volume.name, uses, used.read_only, &claim, &object)?;
            if had_driver { provided } else { migrated(provided) }
        }
        (None, Some(source)) => claims::of_inline(pod, uid, &volume.name, source),
        (None, None) => match pod_sync_in_tree::translation::of_pod(volume, namespace)? {
            // A volume of a pod has no claim that could make it read-only.
            Some(object) => migrated(claims::of_object(&object, false)?),
            // `is_direct` excludes volumes of other kinds.
            None => return Err(format!("volume {} has no source", volume.name)),
        },
    };
    let csi = match &provided.source {
        Source::Csi(csi) => csi,
        Source::InTree(in_tree) => {
            let rules = DriverRules::of(None);
            let labels = labels(tools, pod, &volume.name, &provided, &rules)?;
            let desired = in_tree::desired(uid, in_tree, provided.sizes.as_ref(), attaches);
            let desired = DesiredVolume { label: labels.mount.clone(), ..desired };
            return Ok(Resolved { pod: Arc::clone(pod), desired, provided, rules, labels });
        }
    };
    let driver = &csi.driver;
    let rules = objects.driver(driver).await;
    let rules =
        rules.map_err(|e| format!("failed to get CSIDriver {driver} of volume {}: {e}", volume.name))?;
    let rules = DriverRules::of(rules.as_ref());
    let labels = labels(tools, pod, &volume.name, &provided, &rules)?;
    let label = labels.mount.clone();
    let desired = DesiredVolume { label, ..claims::desired(uid, &provided, csi, &rules) };
    Ok(Resolved { pod: Arc::clone(pod), desired, provided, rules, labels })
}

/// Marks a volume whose in-tree type became a driver. Volumes that have no driver stay as they are.
fn migrated(mut provided: Provided) -> Provided {
    if let Source::Csi(csi) = &mut provided.source {
        csi.migrated = true;
    }
    provided
}

/// Returns the labels of a volume, and counts several ones in one pod.
fn labels(
    tools: &Tools,
    pod: &Pod,
    name: &str,
    provided: &Provided,
    rules: &DriverRules,
) -> Result<Labels, String> {
    let labels = selinux::labels(pod, name, provided, rules, tools.file_label.as_ref());
    if labels.as_ref().map_or(true, |labels| labels.are_several) {
        let is_enforced = tools.enforces_labels(provided);
        tools.metrics.found(Finding::PodMismatch, provided, is_enforced);
    }
    labels
}
