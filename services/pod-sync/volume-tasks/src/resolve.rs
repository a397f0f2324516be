//! Reads the objects of a pod's volumes.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Pod, Volume as PodVolume};
use pod_sync_volume_manager::desired::DesiredVolume;
use quintlet_model::ids::PodUid;

use crate::claims::{self, DriverRules, Provided, Uses};
use crate::objects::VolumeObjects;

/// A volume of a pod with everything that operations need.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub(crate) pod: Arc<Pod>,
    /// The volume for the desired state.
    pub(crate) desired: DesiredVolume,
    /// The volume of the driver.
    pub(crate) provided: Provided,
    /// The settings of the driver.
    pub(crate) rules: DriverRules,
}

/// The volumes of a pod, by their names in the pod, and the errors of the others.
#[derive(Debug, Default)]
pub(crate) struct Resolution {
    pub(crate) volumes: BTreeMap<String, Resolved>,
    pub(crate) errors: Vec<String>,
}

/// Resolves all volumes of a pod that a driver provides.
pub(crate) async fn resolve(objects: &dyn VolumeObjects, pod: &Arc<Pod>, uid: &PodUid) -> Resolution {
    let uses = Uses::of(pod);
    let of = |volume| one(objects, pod, uid, volume, &uses);
    let all = claims::provided(pod).into_iter().map(|volume| async move { (volume, of(volume).await) });
    let mut resolution = Resolution::default();
    for (volume, resolved) in join_all(all).await {
        match resolved {
            Ok(resolved) => drop(resolution.volumes.insert(volume.name.clone(), resolved)),
            Err(error) => resolution.errors.push(error),
        }
    }
    resolution
}

async fn one(
    objects: &dyn VolumeObjects,
    pod: &Arc<Pod>,
    uid: &PodUid,
    volume: &PodVolume,
    uses: &Uses,
) -> Result<Resolved, String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let provided = match (claims::claim_of(pod, volume), &volume.csi) {
        (Some(of), _) => {
            let failed = |text: String| claims::of_claim(namespace, &of.name, &text);
            let claim = objects.claim(namespace, &of.name).await;
            let claim = claim.map_err(|e| failed(format!("failed to fetch PVC from API server: {e}")))?;
            let name = claims::check_claim(pod, &of, &claim)?;
            let object = objects.volume(&name).await;
            let object =
                object.map_err(|e| failed(format!("failed to fetch PV {name} from API server: {e}")))?;
            claims::of_persistent_volume(&volume.name, uses, of.read_only, &claim, &object)?
        }
        (None, Some(source)) => claims::of_inline(pod, uid, &volume.name, source),
        // `is_of_driver` selects volumes of the kinds above.
        (None, None) => return Err(format!("volume {} has no source", volume.name)),
    };
    let driver = &provided.csi.driver;
    let rules = objects.driver(driver).await;
    let rules =
        rules.map_err(|e| format!("failed to get CSIDriver {driver} of volume {}: {e}", volume.name))?;
    let rules = DriverRules::of(rules.as_ref());
    let desired = claims::desired(uid, &provided.csi, &rules);
    Ok(Resolved { pod: Arc::clone(pod), desired, provided, rules })
}
