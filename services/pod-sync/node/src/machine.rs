//! IDs and huge pages of the machine, and the resources that hard eviction thresholds keep free.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use pod_sync_decisions::qos::ResourceList;
use quintlet_model::quantity::{Format, Quantity};

/// Eviction signals with a resource whose allocatable amount they reduce.
const RESERVING_SIGNALS: [(&str, &str); 2] =
    [("memory.available", "memory"), ("nodefs.available", "ephemeral-storage")];

/// Returns the content of the first of these files below `root` that is not empty.
fn first_of(root: &Path, files: &[&str]) -> String {
    let read = |file: &&str| std::fs::read_to_string(root.join(file)).ok();
    // Files of a device tree end with a zero byte.
    let text = |content: String| content.trim().trim_end_matches('\0').trim().to_owned();
    files.iter().filter_map(read).map(text).find(|text| !text.is_empty()).unwrap_or_default()
}

/// Returns the UUID of the machine, or the ID of its installation if the firmware has none.
#[must_use]
pub(crate) fn system_uuid(root: &Path) -> String {
    let files = [
        "sys/class/dmi/id/product_uuid",
        "proc/device-tree/system-id",
        "proc/device-tree/vm,uuid",
        "etc/machine-id",
    ];
    first_of(root, &files)
}

/// Returns the ID of the installation, or an empty text.
#[must_use]
pub(crate) fn machine_id(root: &Path) -> String {
    first_of(root, &["etc/machine-id", "var/lib/dbus/machine-id"])
}

/// Returns the bytes of huge pages by resource name, for each size that the kernel supports. The amount may be 0.
#[must_use]
pub fn huge_pages(dir: &Path, sizes: &[u64]) -> BTreeMap<String, i64> {
    let of = |size: &u64| {
        let file = dir.join(format!("hugepages-{}kB/nr_hugepages", size / 1024));
        let pages = std::fs::read_to_string(file).ok()?.trim().parse::<i64>().ok()?;
        let size = i64::try_from(*size).ok()?;
        let name = format!("hugepages-{}", Quantity::from_units(size, Format::Binary));
        Some((name, pages.saturating_mul(size)))
    };
    sizes.iter().filter_map(of).collect()
}

/// A threshold of `evictionHard` is neither a quantity nor a percentage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{signal}: {threshold:?} {problem}")]
pub struct EvictionThresholdError {
    signal: &'static str,
    threshold: String,
    problem: String,
}

/// Returns the amounts that hard eviction keeps free, by resource.
pub fn eviction_reserve(
    thresholds: &[(String, String)],
    capacity: &BTreeMap<String, ApiQuantity>,
) -> Result<ResourceList, EvictionThresholdError> {
    let mut all = ResourceList::new();
    for (signal, resource) in RESERVING_SIGNALS {
        let Some((_, threshold)) = thresholds.iter().rfind(|(name, _)| name == signal) else { continue };
        let error =
            |problem: String| EvictionThresholdError { signal, threshold: threshold.clone(), problem };
        quintlet_config::checks::threshold(threshold).map_err(|problem| error(problem.to_string()))?;
        let amount = match threshold.strip_suffix('%') {
            Some(percent) => {
                let whole = capacity.get(resource).map(Quantity::of).unwrap_or_default().value();
                let percent: f64 = percent.parse().map_err(|_| error("is not a number".to_owned()))?;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_precision_loss,
                    reason = "far below 2^53 bytes"
                )]
                let bytes = (whole as f64 * percent / 100.0) as i64;
                Quantity::from_units(bytes, Format::Binary)
            }
            None => Quantity::parse(threshold).map_err(|e| error(e.to_string()))?,
        };
        all.insert(resource.to_owned(), amount);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_firmware_uuid_uses_the_machine_id() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!((system_uuid(root.path()), machine_id(root.path())), (String::new(), String::new()));
        write("var/lib/dbus/machine-id", "dbus\n");
        assert_eq!(machine_id(root.path()), "dbus");
        write("etc/machine-id", "installed\n");
        assert_eq!(
            (system_uuid(root.path()), machine_id(root.path())),
            ("installed".into(), "installed".into())
        );
        write("proc/device-tree/vm,uuid", "tree\0");
        assert_eq!(system_uuid(root.path()), "tree");
        write("sys/class/dmi/id/product_uuid", "firmware\n");
        assert_eq!(system_uuid(root.path()), "firmware");
    }

    #[test]
    fn huge_pages_have_a_resource_per_size() {
        let dir = tempfile::tempdir().unwrap();
        for (size, pages) in [("2048kB", "3\n"), ("1048576kB", "0\n")] {
            let size = dir.path().join(format!("hugepages-{size}"));
            std::fs::create_dir(&size).unwrap();
            std::fs::write(size.join("nr_hugepages"), pages).unwrap();
        }
        let got = huge_pages(dir.path(), &[2 << 20, 1 << 30, 64 << 10]);
        assert_eq!(got, [("hugepages-1Gi".to_owned(), 0), ("hugepages-2Mi".to_owned(), 6 << 20)].into());
    }

    #[test]
    fn a_threshold_is_an_amount_or_a_part_of_the_capacity() {
        let capacity = [("memory", "1000Ki"), ("ephemeral-storage", "200Ki")]
            .map(|(k, v)| (k.to_owned(), ApiQuantity(v.into())));
        let reserve = |pairs: &[(&str, &str)]| {
            let pairs: Vec<_> = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            let reserve = eviction_reserve(&pairs, &capacity.clone().into()).map_err(|e| e.to_string())?;
            Ok::<_, String>(reserve.into_iter().map(|(k, v)| (k, v.value())).collect::<Vec<_>>())
        };
        assert_eq!(reserve(&[]).unwrap(), []);
        let both = [("memory.available", "100Ki"), ("nodefs.available", "10%"), ("nodefs.inodesFree", "5%")];
        let want = [("ephemeral-storage".to_owned(), 20 << 10), ("memory".to_owned(), 100 << 10)];
        assert_eq!(reserve(&both).unwrap(), want);
        assert_eq!(reserve(&[("memory.available", "2.5%")]).unwrap(), [("memory".to_owned(), 25 << 10)]);
        assert!(reserve(&[("memory.available", "101%")]).is_err());
    }
}
