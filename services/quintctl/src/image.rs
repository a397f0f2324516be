//! `quintctl image`: images, through cri-proxy's admin socket.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use quintlet_localnode::{Error, cri, import};

/// Work with images.
#[derive(Debug, Clone, clap::Args)]
pub struct ImageArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ImageCommand,
}

/// What can be done with images.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum ImageCommand {
    /// Import an OCI image archive (a tar, not compressed) into containerd
    Import {
        /// The archive, as docker save, skopeo or buildah write it
        file: PathBuf,
        /// Reference to give the image in place of the archive's own
        #[arg(long, value_name = "REF")]
        name: Option<String>,
    },
}

/// Runs the command against the services whose sockets are in `run_dir`.
///
/// # Errors
/// When the archive cannot be used, or cri-proxy or containerd refuse.
pub async fn run(args: ImageArgs, run_dir: &Path) -> Result<(), Error> {
    let ImageCommand::Import { file, name } = args.command;
    let channel = cri::connect(&run_dir.join("cri/admin/cri.sock")).await?;
    let imported = import::import_file(channel, &file, name.as_deref()).await?;
    let mut out = std::io::stdout().lock();
    for image in imported {
        // A closed standard output does not undo the import.
        let _ = writeln!(out, "{} {}", image.name, image.digest);
    }
    Ok(())
}
