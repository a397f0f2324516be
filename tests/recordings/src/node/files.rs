//! Files of a recorded node.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::mount::{MsFlags, mount};
use serde::{Deserialize, Serialize};

/// Bits of a mode apart from the type.
const PERMISSIONS: u32 = 0o7777;

/// A file of any type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Absolute path.
    pub path: String,
    /// Permissions in octal digits.
    pub mode: String,
    /// ID of the owner.
    pub uid: u32,
    /// ID of the group.
    pub gid: u32,
    /// Type and content.
    #[serde(flatten)]
    pub kind: FileKind,
}

/// Type and content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FileKind {
    /// A directory without a mount.
    Directory {},
    /// A directory that is mounted on itself, so that its mounts are propagated.
    Shared {},
    /// A directory on which a tmpfs is mounted, with the options of the mount.
    Memory(String),
    /// A regular file with a text.
    Text(String),
    /// A symbolic link.
    Link(String),
    /// A socket without a process.
    Socket {},
}

/// Returns the directories at and below `dir` on which something is mounted.
fn mounts(dir: &Path) -> anyhow::Result<HashMap<PathBuf, FileKind>> {
    let mut mounts = HashMap::new();
    for mount in procfs::process::Process::myself()?.mountinfo()? {
        if !mount.mount_point.starts_with(dir) {
            continue;
        }
        let size = mount.super_options.get("size").cloned().flatten();
        let kind = match mount.fs_type.as_str() {
            _ if mount.mount_point == dir => FileKind::Shared {},
            "tmpfs" => FileKind::Memory(size.map(|size| format!("size={size}")).unwrap_or_default()),
            other => bail!("{} is a mount of {other}", mount.mount_point.display()),
        };
        mounts.insert(mount.mount_point, kind);
    }
    Ok(mounts)
}

impl FileState {
    /// Returns the files in a directory, and the directory.
    ///
    /// # Errors
    /// Fails for a file that is not one of [`FileKind`], and if one cannot be read.
    pub fn below(dir: &Path) -> anyhow::Result<Vec<Self>> {
        let mut out = Vec::new();
        let mounts = mounts(dir)?;
        collect(dir, &mounts, &mut out)?;
        Ok(out)
    }

    /// Creates the file.
    ///
    /// # Errors
    /// Fails if it cannot be created.
    pub fn restore(&self) -> anyhow::Result<()> {
        let path = Path::new(&self.path);
        self.create(path).with_context(|| self.path.clone())
    }

    fn create(&self, path: &Path) -> anyhow::Result<()> {
        match &self.kind {
            FileKind::Directory {} => fs::create_dir_all(path)?,
            FileKind::Shared {} => {
                fs::create_dir_all(path)?;
                let none = None::<&str>;
                mount(Some(path), path, none, MsFlags::MS_BIND, none)?;
                mount(none, path, none, MsFlags::MS_SHARED | MsFlags::MS_REC, none)?;
            }
            FileKind::Memory(options) => {
                fs::create_dir_all(path)?;
                let options = (!options.is_empty()).then_some(options.as_str());
                mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), options)?;
            }
            FileKind::Text(text) => File::create(path)?.write_all(text.as_bytes())?,
            FileKind::Link(target) => {
                symlink(target, path)?;
                return Ok(());
            }
            FileKind::Socket {} => drop(UnixListener::bind(path)?),
        }
        chown(path, Some(self.uid), Some(self.gid))?;
        let mode = u32::from_str_radix(&self.mode, 8).context("the mode")?;
        Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
    }
}

fn collect(path: &Path, mounts: &HashMap<PathBuf, FileKind>, out: &mut Vec<FileState>) -> anyhow::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    let text = path.to_str().context("a path that is no text")?.to_owned();
    let kind = if meta.is_dir() {
        mounts.get(path).cloned().unwrap_or(FileKind::Directory {})
    } else if meta.is_symlink() {
        FileKind::Link(fs::read_link(path)?.display().to_string())
    } else if meta.is_file() {
        FileKind::Text(fs::read_to_string(path).with_context(|| text.clone())?)
    } else {
        FileKind::Socket {}
    };
    let mode = format!("{:o}", meta.mode() & PERMISSIONS);
    out.push(FileState { path: text, mode, uid: meta.uid(), gid: meta.gid(), kind });
    if meta.is_dir() {
        let mut names: Vec<PathBuf> =
            fs::read_dir(path)?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        names.sort();
        for name in names {
            collect(&name, mounts, out)?;
        }
    }
    Ok(())
}
