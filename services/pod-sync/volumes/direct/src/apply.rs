//! Writes planned volumes to disk. All functions block.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use pod_sync_cri_config::subpath;

use crate::atomic::{self, Payload};
use crate::empty_dir::EmptyDir;
use crate::error::{VolumeFailure, VolumeStep};
use crate::mount_table::MountTable;
use crate::plan::PreparedVolume;
use crate::set_up::SetUp;
use crate::{host_path, ownership};

/// Sets a volume up.
pub(crate) fn apply(
    name: &str,
    plan: PreparedVolume,
    fs_group: Option<u32>,
    now: Timestamp,
    table: &dyn MountTable,
) -> SetUp {
    let fail = |problem: String| VolumeFailure { volume: name.to_owned(), step: VolumeStep::SetUp, problem };
    let failed = |problem: String, is_partial| SetUp::Failed { failure: fail(problem), is_partial };
    match plan {
        // A directory that this makes on the host is never removed.
        PreparedVolume::HostPath { path, kind } => match host_path::check_type(&path, &kind) {
            Ok(()) => SetUp::Ready,
            Err(problem) => failed(problem, false),
        },
        PreparedVolume::EmptyDir(dir, quotas) => match dir.set_up(table) {
            Ok(is_new) => {
                // A container may have filled a volume that was set up before. Moving its files to a project
                // would walk them.
                if is_new {
                    quotas.assign(&dir.path);
                }
                SetUp::Ready
            }
            Err(error) => failed(error.to_string(), true),
        },
        PreparedVolume::Image => SetUp::Ready,
        PreparedVolume::Files { dir, payload, nested } => {
            let has_content = match dir.is_ready(table) {
                Ok(is_ready) => is_ready && dir.path.join("..data").exists(),
                Err(error) => return failed(error.to_string(), true),
            };
            let was_read = payload.is_ok();
            match payload.and_then(|p| write_files(&dir, &p, &nested, fs_group, now, table)) {
                Ok(()) => SetUp::Ready,
                Err(problem) if has_content => SetUp::Stale(fail(problem)),
                Err(problem) => failed(problem, was_read),
            }
        }
    }
}

fn write_files(
    dir: &EmptyDir,
    payload: &Payload,
    nested: &[PathBuf],
    fs_group: Option<u32>,
    now: Timestamp,
    table: &dyn MountTable,
) -> Result<(), String> {
    dir.set_up(table).map_err(|e| e.to_string())?;
    for point in nested {
        subpath::make_dirs(&dir.path, point, 0o755).map_err(|e| e.to_string())?;
    }
    let own = |root: &Path| match fs_group {
        Some(gid) => ownership::set_volume_ownership(root, gid, true),
        None => Ok(()),
    };
    atomic::write(&dir.path, payload, now, own).map(|_| ()).map_err(|e| e.to_string())
}
