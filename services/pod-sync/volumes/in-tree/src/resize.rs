//! Enlarges the file system of a `local` volume to the size of its device (`k8s.io/mount-utils: ResizeFs`,
//! `pkg/volume/local: NodeExpand`).

use std::ffi::OsString;
use std::path::Path;

use quintlet_kit::failpoint::step;
use quintlet_kit::task;

use crate::commands::{self, Until};
use crate::error::Error;
use crate::mount::{FILE_SYSTEM_LIMIT, FileKind, Mounter, disk_format, kind_of};
use crate::volume::{Source, Volume};

/// Returns the program and its arguments that enlarge a mounted file system; `None` for another format.
fn command(format: &str, device: &str, mount: &Path) -> Option<(&'static str, Vec<OsString>)> {
    let mount = || OsString::from(mount);
    match format {
        "ext3" | "ext4" => Some(("resize2fs", vec![device.into()])),
        "xfs" => Some(("xfs_growfs", vec!["-d".into(), mount()])),
        "btrfs" => Some(("btrfs", vec!["filesystem".into(), "resize".into(), "max".into(), mount()])),
        _ => None,
    }
}

impl Mounter {
    /// Enlarges the file system of a mounted `local` volume. Does nothing for a directory or a block volume,
    /// whose size is that of their device.
    ///
    /// # Errors
    /// The format of the device cannot be read or enlarged, or its tool fails.
    pub async fn expand(&self, volume: &Volume) -> Result<(), Error> {
        let Source::Local { path, .. } = &volume.source else { return Ok(()) };
        if volume.is_block {
            return Ok(());
        }
        let checked = path.clone();
        match task::blocking(move || kind_of(&checked)).await? {
            FileKind::Directory => return Ok(()),
            FileKind::BlockDevice => {}
        }
        let mount = self.paths.device_mount(&volume.name)?;
        let format = disk_format(&*self.commands, path).await;
        let format =
            format.map_err(|source| Error::Format { device: path.clone(), source: Box::new(source) })?;
        // mkfs uses the whole device.
        let Some(format) = format else { return Ok(()) };
        let Some((program, arguments)) = command(&format, path, &mount) else {
            return Err(Error::NoResize { format, device: path.clone(), mount });
        };
        let resize = commands::run(&*self.commands, program, &arguments, Until::Limit(FILE_SYSTEM_LIMIT));
        let ended = step!("file system of local volume resized", resize)?;
        if ended.code == Some(0) {
            return Ok(());
        }
        Err(Error::Resize { device: path.clone(), cause: ended.cause(), program, output: ended.output })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_system_has_its_tool() {
        let words = |format| {
            let (program, arguments) = command(format, "/dev/sdb", Path::new("/m"))?;
            let arguments = arguments.iter().map(|word| word.to_string_lossy().into_owned());
            Some(std::iter::once(program.to_owned()).chain(arguments).collect::<Vec<_>>().join(" "))
        };
        for (format, expected) in [
            ("ext3", Some("resize2fs /dev/sdb")),
            ("ext4", Some("resize2fs /dev/sdb")),
            ("xfs", Some("xfs_growfs -d /m")),
            ("btrfs", Some("btrfs filesystem resize max /m")),
            ("vfat", None),
        ] {
            assert_eq!(words(format).as_deref(), expected, "{format}");
        }
    }
}
