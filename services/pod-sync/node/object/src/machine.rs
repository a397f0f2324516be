//! IDs and huge pages of the machine.

use std::collections::BTreeMap;
use std::path::Path;

use quintlet_model::quantity::{Format, Quantity};

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

/// Returns the bytes of huge pages by resource name, for each size that the kernel supports. The amount may
/// be 0.
#[must_use]
pub fn huge_pages(dir: &Path, sizes: &[u64]) -> BTreeMap<String, i64> {
    let pages = |size: &u64| {
        let file = dir.join(format!("hugepages-{}kB/nr_hugepages", size / 1024));
        let pages = std::fs::read_to_string(file).ok()?.trim().parse::<i64>().ok()?;
        let size = i64::try_from(*size).ok()?;
        let name = format!("hugepages-{}", Quantity::from_units(size, Format::Binary));
        Some((name, pages.saturating_mul(size)))
    };
    sizes.iter().filter_map(pages).collect()
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
}
