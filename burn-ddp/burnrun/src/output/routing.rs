//! The routing of input and output: pipes, files, console or terminal, for each rank and stream.

use crate::options::{Options, Stream, Streams};

/// Standard input, output and error of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankIo {
    /// Empty input, and pipes for the output.
    Pipes,
    /// The same, while rank 0 has the terminal.
    PipesBesideTerminal,
    /// The terminal for all three.
    Terminal,
}

/// The routing of all ranks of this node, by local rank.
#[derive(Clone, Copy)]
pub(crate) struct Routing<'a> {
    pub options: &'a Options,
    /// True if local rank 0 gets the terminal.
    pub terminal_lent: bool,
}

impl Routing<'_> {
    pub fn io(&self, local_rank: usize) -> RankIo {
        match (self.terminal_lent, local_rank) {
            (false, _) => RankIo::Pipes,
            (true, 0) => RankIo::Terminal,
            (true, _) => RankIo::PipesBesideTerminal,
        }
    }

    /// Returns the streams that go to files.
    pub fn streams_to_files(&self, local_rank: usize) -> Streams {
        let Options { redirects, tee, .. } = self.options;
        match self.io(local_rank) {
            RankIo::Pipes => Streams { out: redirects.out | tee.out, err: redirects.err | tee.err },
            RankIo::PipesBesideTerminal => Streams::BOTH,
            RankIo::Terminal => Streams::default(),
        }
    }

    /// Returns true if the console shows this stream.
    pub fn is_shown(&self, local_rank: usize, stream: Stream) -> bool {
        let Options { redirects, tee, local_ranks_filter, .. } = self.options;
        let listed = local_ranks_filter.as_ref().is_none_or(|listed| listed.contains(&local_rank));
        !self.terminal_lent && listed && (tee.contains(stream) || !redirects.contains(stream))
    }
}
