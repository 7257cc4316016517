"""When attention stops on a trained model: ART's ablation, and its probe beside whole outputs."""
