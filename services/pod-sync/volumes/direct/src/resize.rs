//! Resizes memory-backed emptyDir volumes while they are mounted (`pkg/volume/emptydir: ResizeEphemeralVolume`).

use std::ffi::CString;
use std::io;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::resize::allocation::memory_size_limit;
use pod_sync_decisions::resize::volumes::failure;
use pod_sync_layout::{NodeSettings, paths};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use quintlet_model::quantity::Quantity;
use rustix::io::Errno;
use rustix::mount::MountFlags;

use crate::Volumes;
use crate::empty_dir;
use crate::mount_table::MountTable;

impl Volumes {
    /// Applies the `sizeLimit` in the spec of `pod` to a memory-backed emptyDir volume. Its content stays. A volume that is not mounted yet
    /// is left alone: it gets the limit when it is mounted.
    ///
    /// # Errors
    /// Fails with a message for the user: the volume holds more than the limit, or is not a tmpfs.
    pub fn resize(&self, pod: &Pod, uid: &PodUid, name: &str, node: &NodeSettings) -> Result<(), String> {
        let limit =
            pod::spec(pod).volumes.iter().flatten().find(|v| v.name == name).and_then(memory_size_limit);
        let Some(limit) = limit else { return Ok(()) };
        let size = empty_dir::memory_size(pod, Some(Quantity::of(limit)), node);
        let path = paths::direct_volume_dir(&self.root, uid, "empty-dir", name);
        let resized = remount(&path, size, &*self.table);
        resized.map_err(|e| {
            let is_refused = e.raw_os_error() == Some(Errno::INVAL.raw_os_error());
            failure(name, is_refused, &e.to_string())
        })
    }
}

fn remount(path: &Path, size: i64, table: &dyn MountTable) -> io::Result<()> {
    match table.file_system_at(path)?.as_deref() {
        Some("tmpfs") => {}
        Some(other) => return Err(io::Error::other(format!("{} is a mount of {other}", path.display()))),
        None => return Ok(()),
    }
    let data = CString::new(format!("size={size}"))?;
    // `noswap` stays, and cannot be added.
    failpoint::file!("volume resized", || {
        rustix::mount::mount_remount(path, MountFlags::empty(), data.as_c_str())
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::mount_table::ProcMountTable;
    use pod_sync_cri_config::subpath::unmount_all;
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    fn pod(limit: &str) -> Pod {
        pod_json(json!({
            "containers": [{"name": "c", "image": "i", "resources": {"limits": {"memory": "64Mi"}}}],
            "volumes": [{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}],
        }))
    }

    #[test]
    fn a_mounted_volume_gets_its_new_size_and_keeps_its_content() {
        let tmp = tempfile::tempdir().unwrap();
        let (uid, node) = (PodUid::parse("u1").unwrap(), NodeSettings::default());
        let volumes = Volumes::new(tmp.path().to_owned());
        let path = paths::direct_volume_dir(tmp.path(), &uid, "empty-dir", "v");
        let resize = |limit: &str| volumes.resize(&pod(limit), &uid, "v", &node);
        assert_eq!(resize("8Mi"), Ok(()), "it is not mounted yet");
        fs::create_dir_all(&path).unwrap();
        rustix::mount::mount(c"tmpfs", &path, c"tmpfs", MountFlags::empty(), c"size=1048576").unwrap();
        fs::write(path.join("kept"), vec![7; 600 << 10]).unwrap();
        let size = || {
            let volume = rustix::fs::statvfs(&path).unwrap();
            volume.f_blocks * volume.f_frsize
        };
        let mut steps = vec![("before".to_owned(), Ok(()), size())];
        for limit in ["2Mi", "700Ki", "512Ki", "1Gi"] {
            steps.push((limit.to_owned(), resize(limit), size()));
        }
        let kept = fs::read(path.join("kept")).map(|content| content.len());
        let mounts = crate::mount_table::mounts_below(&ProcMountTable, &path).unwrap().len();
        unmount_all(&path).unwrap();
        let refused = "failed to resize volume \"v\": mount point not mounted or bad option".to_owned();
        assert_eq!(
            steps,
            [
                ("before".to_owned(), Ok(()), 1 << 20),
                ("2Mi".to_owned(), Ok(()), 2 << 20),
                ("700Ki".to_owned(), Ok(()), 700 << 10),
                ("512Ki".to_owned(), Err(refused), 700 << 10),
                ("1Gi".to_owned(), Ok(()), 64 << 20),
            ],
            "the last one has the memory limit of the pod"
        );
        assert_eq!((kept.unwrap(), mounts), (600 << 10, 1));
    }
}
