//! The choice of a backend: a name on the command line becomes a type.
//!
//! A program for a single backend needs none of this: it names its backend, and its group is
//! [`ProcessGroup::from_env`].

use burn::tensor::backend::Backend;
use burn_ddp::{Ddp, Error, ProcessGroup, Result};
use burn_flex::Flex;
use burn_ndarray::NdArray;
use clap::ValueEnum;

/// The name of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// Burn's CPU backend
    Flex,
    /// The older CPU backend
    Ndarray,
    // Also without the feature: "built without it" helps a user, "not a possible value" does not.
    /// An NVIDIA GPU for each process, gradients reduced by NCCL; in a build with `--features cuda`
    Cuda,
}

impl BackendName {
    /// Refuses a backend that is not in this build.
    ///
    /// # Errors
    /// A configuration error when the program was built without the backend.
    pub fn check(self) -> Result<()> {
        if self == Self::Cuda && cfg!(not(feature = "cuda")) {
            return Err(Error::config(
                "--backend cuda: this program was built without it; build with --features cuda",
            ));
        }
        Ok(())
    }

    /// Connects this rank with its peers and runs `program` on this backend.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), of [`Trains::begin`] and of the program.
    pub fn run(self, program: impl Program) -> Result<()> {
        match self {
            Self::Flex => run_on::<Flex>(program),
            Self::Ndarray => run_on::<NdArray>(program),
            #[cfg(feature = "cuda")]
            Self::Cuda => run_on::<burn_cuda::Cuda>(program),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => self.check(),
        }
    }
}

fn run_on<B: Trains>(program: impl Program) -> Result<()> {
    let group = B::begin()?;
    // An error of this rank is told to its peers.
    group.finish(program.train(&group))
}

/// A training program that is written for any backend.
pub trait Program {
    /// Trains as one rank of `group`.
    ///
    /// # Errors
    /// Whatever ends the program.
    fn train<B: Trains>(self, group: &ProcessGroup<Ddp<B>>) -> Result<()>;
}

/// A backend whose ranks can find their device and connect. `group.device()` is the device from then on.
pub trait Trains: Backend {
    /// The group of this process, made for the device that its rank drives.
    ///
    /// # Errors
    /// A wrong environment, peers that do not connect in time, and a device that is missing.
    fn begin() -> Result<ProcessGroup<Ddp<Self>>>;
}

impl Trains for Flex {
    fn begin() -> Result<ProcessGroup<Ddp<Self>>> {
        ProcessGroup::from_env(&Default::default())
    }
}

impl Trains for NdArray {
    fn begin() -> Result<ProcessGroup<Ddp<Self>>> {
        ProcessGroup::from_env(&Default::default())
    }
}

#[cfg(feature = "cuda")]
impl Trains for burn_cuda::Cuda {
    fn begin() -> Result<ProcessGroup<Ddp<Self>>> {
        let device = burn_ddp_nccl::local_device::<Self>()?;
        burn_ddp_nccl::process_group::<Ddp<Self>>(&device)
    }
}
