//! `kubelet_volume_stats_*` (`pkg/kubelet/metrics/collectors/volume_stats.go`).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use quintlet_proto::podsync::v1::{DiskUsage, PodStorage, VolumeStorage};

type Value = fn(&DiskUsage) -> u64;

const FAMILIES: [(&str, &str, Value); 6] = [
    ("kubelet_volume_stats_available_bytes", "Number of available bytes in the volume", |u| {
        u.available_bytes
    }),
    ("kubelet_volume_stats_capacity_bytes", "Capacity in bytes of the volume", |u| u.capacity_bytes),
    ("kubelet_volume_stats_inodes", "Maximum number of inodes in the volume", |u| u.inodes),
    ("kubelet_volume_stats_inodes_free", "Number of free inodes in the volume", |u| u.inodes_free),
    ("kubelet_volume_stats_inodes_used", "Number of used inodes in the volume", |u| u.inodes_used),
    ("kubelet_volume_stats_used_bytes", "Number of used bytes in the volume", |u| u.used_bytes),
];

/// Returns the metrics of volumes of claims. A claim that several pods use appears once.
#[must_use]
pub(crate) fn text(pods: &[PodStorage]) -> String {
    let volumes = pods.iter().flat_map(|pod| &pod.volumes);
    let claims = volumes.filter_map(|volume| {
        let (claim, _) = (volume.claim.as_ref()?, volume.usage.as_ref()?);
        Some(((claim.namespace.as_str(), claim.name.as_str()), volume))
    });
    let claims: BTreeMap<(&str, &str), &VolumeStorage> = claims.collect();
    let mut out = String::new();
    for (name, help, value) in FAMILIES {
        let values = claims.iter().filter_map(|(claim, volume)| Some((*claim, value(&volume.usage?))));
        family(&mut out, (name, help), values);
    }
    out
}

/// Writes a family, unless it has no values.
fn family<'a>(
    out: &mut String,
    (name, help): (&str, &str),
    values: impl Iterator<Item = ((&'a str, &'a str), u64)>,
) {
    for (number, ((namespace, claim), value)) in values.enumerate() {
        // Writing to a String does not fail.
        if number == 0 {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        }
        let _ = writeln!(out, "{name}{{namespace={namespace:?},persistentvolumeclaim={claim:?}}} {value}");
    }
}

#[cfg(test)]
mod tests {
    use quintlet_proto::podsync::v1::ClaimReference;

    use super::*;

    #[test]
    fn each_claim_appears_once_and_other_volumes_do_not() {
        let volume = |claim: Option<&str>, used_bytes| VolumeStorage {
            usage: Some(DiskUsage { used_bytes, capacity_bytes: 100, ..DiskUsage::default() }),
            claim: claim.map(|name| ClaimReference { namespace: "shop".into(), name: name.into() }),
            ..VolumeStorage::default()
        };
        let pod = |volumes| PodStorage { volumes, ..PodStorage::default() };
        let pods = [pod(vec![volume(Some("data"), 7), volume(None, 9)]), pod(vec![volume(Some("data"), 7)])];
        let text = text(&pods);
        let label = "{namespace=\"shop\",persistentvolumeclaim=\"data\"}";
        assert_eq!(text.matches(label).count(), FAMILIES.len(), "{text}");
        assert!(text.contains(&format!("kubelet_volume_stats_used_bytes{label} 7\n")), "{text}");
        assert!(text.contains(&format!("kubelet_volume_stats_capacity_bytes{label} 100\n")), "{text}");
        assert_eq!(super::text(&[pod(vec![volume(None, 9)])]), "");
    }
}
