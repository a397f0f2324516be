//! Resizes memory-backed emptyDir volumes while they are mounted
//! (`pkg/volume/emptydir: ResizeEphemeralVolume`).

use std::ffi::CString;
use std::io;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::resize::allocation::memory_size_limit;
use pod_sync_decisions::resize::volumes::failure;
use pod_sync_layout::paths;
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use quintlet_model::quantity::Quantity;
use rustix::io::Errno;
use rustix::mount::MountFlags;

use crate::Volumes;
use crate::mount_table::MountTable;

impl Volumes {
    /// Applies the `sizeLimit` in the spec of `pod` to a memory-backed emptyDir volume. Its content stays. A
    /// volume that is not mounted yet is left alone: it gets the limit when it is mounted. Unlike the size of
    /// a mount, the new size is not bounded by the memory limit of the pod or of the node.
    ///
    /// # Errors
    /// Fails with a message for the user: the volume holds more than the limit, or is not a tmpfs.
    pub fn resize(&self, pod: &Pod, uid: &PodUid, name: &str) -> Result<(), String> {
        let limit =
            pod::spec(pod).volumes.iter().flatten().find(|v| v.name == name).and_then(memory_size_limit);
        let Some(limit) = limit else { return Ok(()) };
        let path = paths::direct_volume_dir(&self.root, uid, "empty-dir", name);
        let resized = remount(&path, Quantity::of(limit).value(), &*self.table);
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
    let remount = |options: &str| -> io::Result<()> {
        let data = CString::new(options)?;
        failpoint::file!("volume resized", || {
            rustix::mount::mount_remount(path, MountFlags::empty(), data.as_c_str())
        })?;
        Ok(())
    };
    remount(&format!("size={size}")).or_else(|error| match Errno::from_io_error(&error) {
        // Linux 6.4 and some after it refuse to remount a `noswap` mount unless the option is repeated. On
        // other mounts the option is refused with the same error.
        Some(Errno::INVAL) => remount(&format!("size={size},noswap")).map_err(|_| error),
        Some(_) | None => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
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

    /// Resizes a volume that is mounted with `options` and holds 600 KiB. Returns the answer and the size
    /// after each step.
    fn resized(options: &CStr, limits: &[&str]) -> Vec<(Result<(), String>, u64)> {
        let tmp = tempfile::tempdir().unwrap();
        let uid = PodUid::parse("u1").unwrap();
        let volumes = Volumes::new(tmp.path().to_owned());
        let path = paths::direct_volume_dir(tmp.path(), &uid, "empty-dir", "v");
        let resize = |limit: &str| volumes.resize(&pod(limit), &uid, "v");
        assert_eq!(resize("8Mi"), Ok(()), "it is not mounted yet");
        fs::create_dir_all(&path).unwrap();
        rustix::mount::mount(c"tmpfs", &path, c"tmpfs", MountFlags::empty(), options).unwrap();
        fs::write(path.join("kept"), vec![7; 600 << 10]).unwrap();
        let size = || {
            let volume = rustix::fs::statvfs(&path).unwrap();
            volume.f_blocks * volume.f_frsize
        };
        let steps = limits.iter().map(|limit| (resize(limit), size())).collect();
        let kept = fs::read(path.join("kept")).map(|content| content.len());
        let mounts = crate::mount_table::mounts_below(&ProcMountTable, &path).unwrap().len();
        unmount_all(&path).unwrap();
        assert_eq!((kept.unwrap(), mounts), (600 << 10, 1));
        steps
    }

    #[test]
    fn a_mounted_volume_gets_its_new_size_and_keeps_its_content() {
        let refused = "failed to resize volume \"v\": mount point not mounted or bad option".to_owned();
        for options in [c"size=1048576", c"size=1048576,noswap"] {
            assert_eq!(
                resized(options, &["2Mi", "700Ki", "512Ki", "1Gi"]),
                [
                    (Ok(()), 2 << 20),
                    (Ok(()), 700 << 10),
                    (Err(refused.clone()), 700 << 10),
                    (Ok(()), 1 << 30),
                ],
                "{options:?}, beside a memory limit of 64 MiB"
            );
        }
    }
}
