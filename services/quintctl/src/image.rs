//! `quintctl image`: manages images through cri-proxy's admin socket.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use quintlet_localnode::{Error, cri, import};

/// Manage images.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    pub(crate) command: ImageCommand,
}

#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum ImageCommand {
    /// Import an OCI image archive (an uncompressed tar file) into containerd
    Import {
        /// Archive written by docker save, skopeo or buildah
        file: PathBuf,
        /// Reference for the image instead of the one in the archive
        #[arg(long, value_name = "REF")]
        name: Option<String>,
    },
}

/// Runs the command against the services whose sockets are in `run_dir`.
///
/// # Errors
/// The archive is invalid, or cri-proxy or containerd returns an error.
pub(crate) async fn run(args: ImageArgs, run_dir: &Path) -> Result<(), Error> {
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
